"""What is optimised: advantages, losses, KL and aggregation as pure functions of tensors, and the named recipes made of them.

Nothing here knows a model, a device or a batch's dict. Axes are suffixes of names: ``B`` rows, ``L`` padded length.
"""
