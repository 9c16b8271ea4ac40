"""Trained models of other libraries: read by name (`hub`), and trained as a run's decoder or encoder."""
