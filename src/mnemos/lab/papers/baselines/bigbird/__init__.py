"""BigBird (Zaheer et al. 2020): block-sparse attention of encoders."""
