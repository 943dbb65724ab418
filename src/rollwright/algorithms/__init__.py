"""Advantages, losses and KL as pure functions of tensors, and the named recipes made of them."""
