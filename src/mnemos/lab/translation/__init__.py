"""What translation alone needs: parallel text, vocabularies, scores."""
