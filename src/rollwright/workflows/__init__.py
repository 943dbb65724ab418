"""How one episode goes: base classes, the registry, built-in workflows, Task, the model wrapper."""
