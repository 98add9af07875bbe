"""Training of Fluxion's predictor: labels, samples of a text, the fit, and its quality on held-out samples."""
