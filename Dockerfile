# syntax=docker/dockerfile:1
# `gen serve` on a CPU, with all models of the package. An API key is needed, since the container
# listens on all addresses:
#
#   docker build -t gen .
#   docker run -p 8123:8123 -e GEN_API_KEY=... gen
#
# TORCH names another build. A wheel for CPUs alone is a tenth of the size of the default one:
#
#   docker build -t gen --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_EXTRA_INDEX_URL=... .

FROM python:3.13-slim AS build
ARG TORCH=torch==2.13.0
# the index that has TORCH, if the default one does not; pip reads it from the environment
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/gen
ENV PATH=/opt/gen/bin:$PATH
# hadolint ignore=DL3013  # a pinned version by default
RUN pip install "$TORCH"
WORKDIR /source
COPY . .
# hadolint ignore=DL3013  # this source tree
RUN pip install ".[serve,video]"

FROM python:3.13-slim
RUN useradd --create-home --uid 1000 gen
COPY --from=build /opt/gen /opt/gen
ENV PATH=/opt/gen/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/gen
EXPOSE 8123
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8123/health', timeout=4)"]
ENTRYPOINT ["gen", "serve", "--host", "0.0.0.0", "--port", "8123"]
