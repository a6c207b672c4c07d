"""What every verb shares: data, the training loop, checkpoints, measurement, provenance."""
