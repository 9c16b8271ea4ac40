"""What vision alone needs: detection, and image classifiers with caches."""
