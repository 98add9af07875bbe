"""What Fluxion learns about attention heads before it serves: features, labels, the predictor and its training."""
