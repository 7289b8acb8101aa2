#!/bin/sh
# Installs what tests/run/test_two_hosts.py needs on Debian: an sshd and an ssh client (the test
# starts its own sshd, with its own port and keys) and pdsh, by which `deepspeed --hostfile` starts
# the other hosts. Does nothing where they are there already.
set -eu

packages=""
command -v pdsh >/dev/null || packages="$packages pdsh"
command -v ssh >/dev/null || packages="$packages openssh-client"
[ -x /usr/sbin/sshd ] || packages="$packages openssh-server"
if [ -z "$packages" ]; then
    exit 0
fi

if [ "$(id -u)" -ne 0 ]; then
    echo "error: missing:$packages; run this script as root" >&2
    exit 2
fi
if ! command -v apt-get >/dev/null; then
    echo "error: missing:$packages; there is no apt-get here: install them by hand" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
# The package would start a system-wide sshd, which nobody asked for: forbid it while installing.
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
# The package lists may be there already, and the network slow: fetch them only when that fails.
# shellcheck disable=SC2086  # a list of package names
apt-get install -y -qq --no-install-recommends $packages || {
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends $packages
}
