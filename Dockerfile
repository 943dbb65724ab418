# syntax=docker/dockerfile:1
# Rollwright with its servers, for a CPU or an NVIDIA GPU:
#
#   docker build -t rollwright .                                                      a CPU
#   docker build -t rollwright:gpu --build-arg ROLLWRIGHT_TORCH=any .                 a GPU (torch's CUDA build)
#
#   docker run --rm -it --shm-size 2g -v "$PWD/runs:/work/runs" rollwright run quickstart
#   docker run --rm -it --gpus all --shm-size 16g -v "$PWD/runs:/work/runs" rollwright:gpu doctor
#
# The sandbox for Python that a model writes makes namespaces of its own, which Docker forbids unless the container is started with
# `--security-opt seccomp=unconfined --security-opt systempaths=unconfined` (docs/sandbox.md).
#
# An index of your own is passed on as a secret, so that it stays out of the image:
#   docker build --secret id=pip,src=$HOME/.config/pip/pip.conf .
FROM python:3.12-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap libseccomp2 git \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rollwright
ENV PATH=/opt/rollwright/.venv/bin:$PATH OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
# cpu: torch's CPU build; any: what the indexes offer, which for Linux is the CUDA build.
ARG ROLLWRIGHT_TORCH=cpu
ARG EXTRAS=all

COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY scripts/install.py scripts/install.py
COPY src src
COPY examples examples
RUN --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    python -m venv .venv && .venv/bin/python scripts/install.py -c constraints/cpu.txt ".[$EXTRAS]"

# The user that runs: what it writes is in /work/runs.
RUN useradd --create-home --uid 1000 rollwright && mkdir -p /work/runs && chown -R rollwright /work
USER rollwright
WORKDIR /work
ENTRYPOINT ["rollwright"]
CMD ["--help"]
