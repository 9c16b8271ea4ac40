"""What a trained model scores, and what its memory holds and is worth."""
