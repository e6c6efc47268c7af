"""What the kernels reach on a GPU, beside what the same GPU copies and multiplies in the same run."""
