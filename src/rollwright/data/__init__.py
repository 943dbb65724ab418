"""Where tasks come from: tasksets, file formats, the dataset registry, procedural tasks and the resumable dataloader. No models."""
