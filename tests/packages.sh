#!/usr/bin/env bash
# Builds the Debian packages twice, compares the results, and checks them with lintian and man.
# Then installs, upgrades, removes and purges them in a minimal Debian with its own systemd, in
# namespaces of its own (tests/packages-life.sh), and follows the guides for systemd there.
#
#   tests/packages.sh DIR     DIR contains tunnel-server and tunnel-agent for this machine
#
# Exits with 77 and a reason on machines where the test cannot run. The test needs root, cgroup v2,
# a package mirror for the first run (the minimal Debian is then in target/tools), and some programs
# (Debian: dpkg-dev binutils lintian groff man-db mmdebstrap procps iproute2).
set -euo pipefail
cd "$(dirname "$0")/.."
binaries=$1
export PATH=$PATH:/usr/sbin:/sbin

skip() { echo "skip: $*"; exit 77; }
say() { echo "packages-test: $*"; }
fail() { say "$*"; exit 1; }

[ "$(id -u)" -eq 0 ] || skip "needs root"
for program in dpkg-deb strip lintian groff man mmdebstrap unshare nsenter pgrep ip python3; do
  command -v "$program" >/dev/null || skip "needs $program"
done
[ -x "$binaries/tunnel-server" ] && [ -x "$binaries/tunnel-agent" ] || skip "needs binaries: make static"
cgroups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
[ -n "$cgroups" ] || skip "needs cgroup v2"

work=$(mktemp -d)
group=$cgroups/culvert-packages-$$
init=
cleanup() {
  [ -z "$init" ] || kill -KILL "$init" 2>/dev/null || true
  # The kernel frees the groups shortly after their processes.
  for _ in $(seq 50); do
    [ -d "$group" ] || break
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
  done
  rm -rf "$work"
}
trap cleanup EXIT

mkdir "$work/binaries"
for program in tunnel-server tunnel-agent; do
  strip -o "$work/binaries/$program" "$binaries/$program" 2>/dev/null || cp "$binaries/$program" "$work/binaries/$program"
done
# build NAME VERSION: builds the packages into a folder.
build() {
  OUT=$work/$1 DEB_VERSION=$2 MAINTAINER='Culvert test <test@culvert.example>' BINARIES=$work/binaries deploy/packages.sh
}
build 1 0.1.0-1
build 2 0.1.0-2 >/dev/null
(umask 077; TZ=Asia/Tokyo build again 0.1.0-1 >/dev/null)
cmp "$work/1/SHA256SUMS" "$work/again/SHA256SUMS" || fail "two builds differ"
(cd "$work/1" && sha256sum --quiet -c SHA256SUMS)
say "a second build has the same bytes"

lintian --no-cfg --allow-root --fail-on error "$work"/1/*.deb || fail "lintian reports errors"
say "lintian reports no error"

for program in tunnel-server tunnel-agent; do
  dpkg-deb -x "$work"/1/culvert-$program*.deb "$work/unpacked"
  # -Z formats without a terminal. Warnings are the only output on standard error.
  warnings=$(MANROFFSEQ='' MANWIDTH=80 LC_ALL=C.UTF-8 man --warnings -E UTF-8 -l -Tutf8 -Z "$work/unpacked/usr/share/man/man8/$program.8.gz" 2>&1 >/dev/null)
  [ -z "$warnings" ] || fail "man: $warnings"
  for shell in bash zsh; do
    command -v $shell >/dev/null || continue
    find "$work/unpacked/usr/share/$shell"* -type f -exec $shell -n {} ';'
  done
done
say "man reports no warning"

codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-stable}")
tools=${CARGO_TARGET_DIR:-target}/tools
debian=$tools/debian-systemd-$codename-$(dpkg --print-architecture).tar
if [ ! -f "$debian" ]; then
  say "fetching a minimal Debian $codename"
  mkdir -p "$tools"
  mmdebstrap --quiet --variant=minbase --include=systemd,systemd-sysv,procps,curl,iproute2,nftables "$codename" "$work/debian.tar" || skip "needs a mirror of $codename"
  mv "$work/debian.tar" "$debian"
fi
mkdir "$work/root"
tar -C "$work/root" -xf "$debian"
mkdir -p "$work/root/packages" "$work/root/clone/target"
cp -r "$work/1" "$work/2" tests/packages-life.sh tests/units-life.sh docs/how-to/packages.md docs/how-to/systemd.md \
  docs/how-to/upgrade.md docs/how-to/node-local-dns.md docs/how-to/edge-apiserver.md "$work/root/packages/"
cp -r deploy "$work/root/clone/"
cp -r "$work/binaries" "$work/root/clone/target/release"

# boot: becomes systemd as process 1 of a system that shares only the kernel with this one.
boot() {
  mkdir "$group" && echo "$BASHPID" >"$group/cgroup.procs"
  exec unshare --mount --pid --fork --kill-child --uts --ipc --net --cgroup bash -euc '
    cd "$1"
    mount --make-rprivate /
    mount --bind "$1" "$1"
    cd "$1"
    mount -t proc proc proc
    mount -t sysfs -o ro sysfs sys
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    mount -t tmpfs -o mode=755 tmpfs run
    mount -t tmpfs tmpfs tmp
    mount -t tmpfs -o mode=755 tmpfs dev
    for device in null zero full random urandom tty; do
      touch dev/$device
      mount --bind /dev/$device dev/$device
    done
    mkdir dev/pts dev/shm
    mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
    ln -s pts/ptmx dev/ptmx
    mount -t tmpfs tmpfs dev/shm
    hostname culvert-packages
    ip link set lo up
    pivot_root . mnt
    umount -l /mnt
    exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system systemd.unified_cgroup_hierarchy=1
  ' boot "$work/root" >"$work/boot.log" 2>&1 </dev/null
}
boot &
init=$!
disown
inside() {
  nsenter -t "$(pgrep -P "$init")" --mount --pid --uts --ipc --net --cgroup env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    DEBIAN_FRONTEND=noninteractive "$@"
}
state=
for _ in $(seq 300); do
  kill -0 "$init" 2>/dev/null || break
  state=$(inside systemctl is-system-running 2>/dev/null || true)
  case $state in running | degraded) break ;; esac
  sleep 0.2
done
case $state in
  running | degraded) ;;
  *) cat "$work/boot.log"; skip "systemd does not start in namespaces here ($state)" ;;
esac
inside bash /packages/packages-life.sh
