"""``rollwright push``: upload a checkpoint and its model card to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import typer

from rollwright.errors import CheckpointError, ConfigError


def push(
    checkpoint: Path = typer.Argument(..., help="Checkpoint directory, or a run directory: then its newest final checkpoint."),  # noqa: B008
    repository: str = typer.Argument(..., metavar="OWNER/NAME", help="Repository on the Hub; created if it does not exist."),
    private: bool = typer.Option(True, "--private/--public", help="Visibility of a new repository."),
    revision: str | None = typer.Option(None, help="Branch to upload to; default: main."),
    message: str = typer.Option("Upload a checkpoint of Rollwright", help="Message of the commit."),
) -> None:
    """Upload a checkpoint. The token is that of `hf auth login`, or HF_TOKEN."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    folder = _checkpoint(checkpoint)
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, revision=revision, commit_message=message)
    except HFValidationError as error:
        raise CheckpointError(f"{repository!r} is no name of a repository ({error}); give OWNER/NAME.") from None
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        raise CheckpointError(
            f"{folder} was not uploaded to {repository}: {error}. Check the name, and that `hf auth login` or HF_TOKEN "
            "gives a token that may write there."
        ) from error
    print(f"uploaded {folder} to {commit.commit_url}")


#: Files of which a checkpoint has one: a model's, or an adapter's.
_DESCRIPTIONS = ("config.json", "adapter_config.json")


def _checkpoint(path: Path) -> Path:
    if any((path / name).exists() for name in _DESCRIPTIONS):
        return path
    found = [config for name in _DESCRIPTIONS for config in path.glob(f"**/checkpoints/final/{name}")]
    if not found:
        raise ConfigError(
            f"{path} is no checkpoint in Hugging Face form and holds none: give a directory with {' or '.join(_DESCRIPTIONS)}."
        )
    return max(found, key=lambda config: config.stat().st_mtime).parent
