"""Data sets as tasks: every training batch is a pure function of its index, so a run can resume exactly.

Read `task` first; then the families: `token_task` and `text`, `generated`, `arrays`, `image_task`, `user_data`.
"""
