"""What speech alone needs: recordings, filter banks, CTC."""
