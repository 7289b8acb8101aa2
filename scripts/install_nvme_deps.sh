#!/bin/sh
# Installs what DeepSpeed's async_io operator is compiled against on Debian: libaio and its headers.
# NVMe offload needs it on every host; so do tests/train/test_nvme.py. Does nothing where they are
# there already.
set -eu

if printf '#include <libaio.h>\n' | c++ -E -x c++ - >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "error: missing: libaio-dev; run this script as root" >&2
    exit 2
fi
if ! command -v apt-get >/dev/null; then
    echo "error: missing: libaio's headers; there is no apt-get here: install them by hand" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
# The package lists may be there already, and the network slow: fetch them only when that fails.
apt-get install -y -qq --no-install-recommends libaio-dev || {
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends libaio-dev
}
