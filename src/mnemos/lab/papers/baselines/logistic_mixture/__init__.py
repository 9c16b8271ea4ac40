"""Mixture of discretised logistics (Salimans et al. 2017): a head for the brightnesses of pixels."""
