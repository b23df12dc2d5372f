# The image of the Helm chart, and of `docker run`. `make image` builds it: docs/install-kubernetes.md.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY hangwatch hangwatch
RUN python3 -m venv --without-pip /opt/hangwatch \
 && python3 -m venv /opt/pip \
 && /opt/pip/bin/pip --python /opt/hangwatch/bin/python install --no-cache-dir --disable-pip-version-check .

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="hangwatch" \
      org.opencontainers.image.description="Finds hung distributed training jobs and names the odd rank" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# py-spy comes along: it is one of hangwatch's requirements. pip does not.
COPY --from=build /opt/hangwatch /opt/hangwatch
ENV PATH=/opt/hangwatch/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
RUN install -d -o 65532 -g 65532 -m 0700 /var/lib/hangwatch
WORKDIR /
EXPOSE 9836 9837
# What reads files (explain, merge, report) needs no rights. What looks at processes of other users does, and runtimes
# give added capabilities to root only: run it with --user 0 --pid host, all capabilities dropped but SYS_PTRACE,
# DAC_READ_SEARCH, KILL and SYSLOG, as the chart does.
USER 65532:65532
# Kubernetes does not look at this; the chart has probes of its own.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9837/healthz', timeout=4)"]
ENTRYPOINT ["hangwatch"]
CMD ["run"]
