"""Training of Fluxion's predictor: labels, samples of a text, the fit, and what it is worth."""
