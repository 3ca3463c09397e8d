# The service. On CPUs: docker build -t ragcache .
# On NVIDIA GPUs: docker build -t ragcache:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
RUN pip install --no-cache-dir build==1.6.1 hatchling==1.33.0
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY ragcache ragcache
COPY schemas schemas
COPY connectors connectors
COPY api api
COPY examples/handbook examples/handbook
ARG COMMIT=
RUN SOURCE_COMMIT="${COMMIT}" python -m build --wheel --no-isolation --outdir /wheels

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# All that settings of the service ask for, so that one image serves alone, in replicas and by the chart.
ARG EXTRAS=documents,gguf,mcp,minilm,otel,postgres,ray,redis,s3,sentence-transformers
# A C compiler makes the products of packed weights, and on a GPU the module of Triton's driver.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch==2.13.0 \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt \
        "$(echo /tmp/wheels/*.whl)[${EXTRAS}]" \
    && rm -r /tmp/wheels /tmp/constraints.txt \
    && useradd --system --home-dir /var/lib/ragcache --uid 10001 ragcache \
    && install -d -o ragcache -g ragcache /var/lib/ragcache /var/lib/ragcache/models
USER 10001:10001
WORKDIR /var/lib/ragcache
# All that is written stays in the volume: states, models of the hub, converted GGUF files, compiled
# kernels. Only /tmp must be writable besides, so that the root file system can be read-only.
ENV HOME=/var/lib/ragcache \
    HF_HOME=/var/lib/ragcache/models \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/ragcache/compiled \
    RAGCACHE_STATE=/var/lib/ragcache/state \
    RAGCACHE_HOST=0.0.0.0 \
    RAGCACHE_PORT=8000
VOLUME /var/lib/ragcache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['RAGCACHE_PORT'] + '/health/ready', timeout=2)"]
ENTRYPOINT ["ragcache"]
CMD ["serve"]
