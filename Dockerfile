# The demo on a CPU, and OutBLAS on a GPU:
#
#   docker build --tag outblas .
#   docker run --name outblas-demo outblas                             # tunes on recorded measurements, writes a report
#   docker cp outblas-demo:/work/runs/demo/report.html .
#   docker build --tag outblas:gpu --build-arg EXTRAS=gpu,tune .
#   docker run --rm --gpus all outblas:gpu outblas doctor              # needs the NVIDIA Container Toolkit
#
# The driver is the host's; CUDA's other parts come as wheels. The wheel of the first stage has no compiled kernels
# unless CUBINS=require and the extra `compile` are given: then the build takes minutes.
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS build
ARG CUBINS=skip
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
WORKDIR /source
RUN python -m pip install --no-cache-dir build==1.6.1 hatchling==1.33.0 numpy==2.2.6 \
    && if [ "$CUBINS" = require ]; then python -m pip install --no-cache-dir '.[compile]'; fi \
    && OUTBLAS_BUILD_CUBINS="$CUBINS" python -m build --wheel --no-isolation --outdir /wheels \
    && python -m build --wheel --no-isolation --outdir /wheels lab

FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
ARG EXTRAS=tune
# The native extension is linked to the C++ library.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libstdc++6 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home outblas \
    && install --directory --owner=outblas /work /work/runs
COPY --from=build /wheels /wheels
RUN wheel="$(ls /wheels/outblas-*.whl)" \
    && python -m pip install --no-cache-dir "${wheel}[${EXTRAS}]" "$(ls /wheels/outblas_lab-*.whl)[report]"
USER outblas
WORKDIR /work
VOLUME /work/runs
CMD ["sh", "-c", "outblas tune --suite grid1000 --agent regressor --budget 8 --device replay:h200 --run runs/demo && outblas report runs/demo"]
