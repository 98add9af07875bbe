"""The command line of `hf_offload_cli.py`, for launchers: `accelerate launch -m hf_offload.cli train-fluxion …`."""

from hf_offload_cli import app

__all__ = ["app"]

if __name__ == "__main__":
    app()
