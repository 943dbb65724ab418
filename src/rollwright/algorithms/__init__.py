"""What is optimised: advantages, losses and KL as pure functions of tensors. Axes are suffixes of names: ``B`` rows, ``L`` padded
length. Which of them a run uses, the config says: ``rollwright.config.recipes`` has their names, and the recipes made of them.
"""
