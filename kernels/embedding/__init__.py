"""Rows of the embedding, by token ids that may still lie on the device. Triton only: the CPU looks rows up itself."""
