"""Averaging through an object store. Knows nothing of torchft, trainers, executors, or clouds beyond fsspec."""
