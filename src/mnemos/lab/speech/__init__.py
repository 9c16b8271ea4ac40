"""Speech: strings of recorded words are transcribed by CTC.

Read `audio` (wav files to log-mel filterbanks), `spoken` (the task, which joins single words), `ctc` (loss and
decoding) and `models` (a Transformer with any attention, and a bidirectional LSTM).
"""
