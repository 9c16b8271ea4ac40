"""Translation: parallel text becomes sub-words, batches by tokens, and sentences of another language.

Read `parallel_text` (files to pairs of sentences) and `translation_vocabulary` (sub-words), then `parallel_corpus`
(cleaning and batches) and `translation`, the task. `translate` uses a trained model, by beam search, and
`translation_scores` compares systems. `marian` takes over the weights of opus-mt.
"""
