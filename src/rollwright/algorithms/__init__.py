"""Objectives: advantages, losses and KL as pure functions of tensors. ``rollwright.config.recipes`` selects them by name.

Suffixes of tensor names are their axes: ``B`` rows, ``L`` padded length.
"""
