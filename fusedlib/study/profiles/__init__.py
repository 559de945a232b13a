"""What study 08's rows say: where the time of a training step goes."""
