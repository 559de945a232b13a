"""Study 08: where the time of a training step goes, by kernel and by part of the model."""
