# One image for api, worker and migrate; the command chooses.
FROM python:3.12-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/armillary
COPY requirements.lock /src/
RUN /opt/armillary/bin/pip install --require-hashes -r /src/requirements.lock
COPY . /src/
RUN /opt/armillary/bin/pip install --no-deps --no-build-isolation /src \
    && /opt/armillary/bin/python -m compileall -q /opt/armillary/lib

FROM python:3.12-slim-bookworm
# A fixed number, so that orchestrators can tell that it is not root.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin armillary \
    && install -d -o armillary -g armillary -m 0700 /var/lib/armillary
COPY --from=build /opt/armillary /opt/armillary
ENV PATH=/opt/armillary/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ARMILLARY_HOST=0.0.0.0 \
    ARMILLARY_PORT=8000 \
    ARMILLARY_DATA_DIR=/var/lib/armillary
USER 10001
WORKDIR /var/lib/armillary
VOLUME /var/lib/armillary
EXPOSE 8000
STOPSIGNAL SIGTERM
# For the API. A worker has no port: compose.yaml turns this off there, its health is its row in the database.
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client as h, os, sys; c = h.HTTPConnection('127.0.0.1', int(os.environ['ARMILLARY_PORT']), timeout=2); c.request('GET', '/health/ready'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["armillary"]
CMD ["api"]
