"""Data sets as tasks: every training batch is a pure function of its index, so a run can resume exactly.

Read `task` first: a `DataConfig` opens data as a `Task`, which has batches (`batch`), a loss and metrics (`metrics`),
and what there is to see. Then three families. Tokens (`token_task`): long documents in segments (`text`, `text_files`,
`vocabulary`), rows that are drawn (`generated`: copying, `recall`, `mad`, `fact_recall`), rows in memory
(`arrays`: `listops`, `text_classes`). Pictures (`image_task`, `pictures`): `images`, `photos`, byte by byte
`pixels`. A user's own loaders: `user_data`. Orders of rows are in `row_order`, worker processes in `prefetch`.
"""
