"""The engine of benchmarks of what is around a model: subclasses answer without waiting, in ``agenerate``."""

from rollwright.inference.engine import InferenceEngine


class InstantEngine(InferenceEngine):
    """An engine whose weights never change and that nothing stops."""

    def get_version(self) -> int:
        return 0

    def set_version(self, version: int) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self, rid: str | None = None) -> None: ...
