#!/usr/bin/env bash
# Builds the two images in a store of their own and runs them as in production: read-only root, no
# capabilities, uid 65532, a memory limit. The script then tests the health checks, an enrollment,
# and a request between two containers on a private network.
#
#   tests/images.sh DIR     DIR contains static tunnel-server and tunnel-agent
#
# Exits with 77 and a reason on machines where the test cannot run. The test needs root, podman,
# runc, netavark, iptables, nsenter and curl (Debian: podman runc netavark iptables).
set -euo pipefail
cd "$(dirname "$0")/.."
binaries=$1
. deploy/podman-store.sh
export PATH=$PATH:/usr/sbin:/sbin

skip() { echo "skip: $*"; exit 77; }
say() { echo "images-test: $*"; }

# The script runs the health checks itself. Without systemd podman logs that it cannot schedule
# them.
podman() { command podman --log-level fatal "$@"; }

[ "$(id -u)" -eq 0 ] || skip "needs root"
for program in podman runc nsenter curl iptables; do
  command -v "$program" >/dev/null || skip "needs $program"
done
[ -x /usr/lib/podman/netavark ] || [ -x /usr/libexec/podman/netavark ] || skip "needs netavark"
[ -x "$binaries/tunnel-server" ] && [ -x "$binaries/tunnel-agent" ] || skip "needs static binaries: make static"

store=$(mktemp -d)
podman_store "$store"
cleanup() {
  podman rm -f -t 1 -a >/dev/null 2>&1 || true
  podman network rm -f culvert-test >/dev/null 2>&1 || true
  podman rmi -a -f >/dev/null 2>&1 || true
  umount "$store/graph" 2>/dev/null || true
  rm -rf "$store"
}
trap cleanup EXIT

say "building"
ENGINE=podman PREFIX=localhost/culvert/ TAG=test BINARIES=$binaries CARGO_TARGET_DIR=$store/target deploy/images.sh
for part in server agent; do
  image=localhost/culvert/tunnel-$part:test
  bytes=$(podman image inspect -f '{{.Size}}' "$image")
  [ "$bytes" -lt 25000000 ] || { say "$image has $bytes bytes, more than 25 MB"; exit 1; }
  [ "$(podman image inspect -f '{{.User}}' "$image")" = 65532:65532 ]
  podman image inspect -f '{{.Labels}}' "$image" | grep -q 'org.opencontainers.image.title:tunnel-'"$part"
  podman image inspect "$image" | grep -q '"healthcheck"'
  say "$image: $bytes bytes"
done

# The network has no route to other networks. The subnet is random, to avoid addresses that are in
# use on this machine.
net=10.213.$((RANDOM % 250)).0
podman network create --internal --disable-dns --subnet "$net/24" culvert-test >/dev/null
common=(--network culvert-test --read-only --cap-drop all --security-opt no-new-privileges --memory 256m
  --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 -d)
server_ip=${net%0}10
say "starting the server"
podman run "${common[@]}" --name server --ip "$server_ip" localhost/culvert/tunnel-server:test \
  run --kubernetes=off --advertise="$server_ip:10262" >/dev/null

healthy() {
  for _ in $(seq 100); do
    if podman healthcheck run "$1" >/dev/null 2>&1; then say "$1 is healthy"; return 0; fi
    sleep 0.2
  done
  say "$1 does not become healthy"
  podman logs "$1" | tail -20
  return 1
}
healthy server
token=$(podman exec server /tunnel-server token create --node worker-1 2>/dev/null)
say "starting the agent"
podman run "${common[@]}" --name agent -e TUNNEL_AGENT_TOKEN="$token" localhost/culvert/tunnel-agent:test \
  run --server="$server_ip:10262" --node-name=worker-1 >/dev/null
healthy agent

for name in server agent; do
  pid=$(podman inspect -f '{{.State.Pid}}' "$name")
  grep -q '^Uid:	65532	65532	65532	65532$' "/proc/$pid/status" || { say "$name: uid"; exit 1; }
  grep -q '^CapEff:	0000000000000000$' "/proc/$pid/status" || { say "$name: capabilities"; exit 1; }
  grep -q '^CapBnd:	0000000000000000$' "/proc/$pid/status" || { say "$name: bounding set"; exit 1; }
  grep -q '^NoNewPrivs:	1$' "/proc/$pid/status" || { say "$name: no_new_privs"; exit 1; }
  grep -Eq '^[0-9]+ [0-9]+ [0-9]+:[0-9]+ [^ ]+ / ro' "/proc/$pid/mountinfo" || { say "$name: root is writable"; exit 1; }
  [ "$(podman inspect -f '{{.HostConfig.Memory}}' "$name")" = 268435456 ] || { say "$name: memory limit"; exit 1; }
  say "$name: uid 65532, no capability, root read-only, memory $(awk '/VmRSS/ { print $2 }' "/proc/$pid/status") kB of 262144"
done

# The request goes from the server's network to the agent's own metrics, which are on the loopback
# interface of the agent's container.
pid=$(podman inspect -f '{{.State.Pid}}' server)
answer=$(nsenter -t "$pid" -n curl -sS --max-time 10 -H 'Host: worker-1:10266' http://127.0.0.1:10264/metrics)
grep -q '^tunnel_agent_' <<<"$answer" || { say "no metrics of the agent: $answer"; exit 1; }
say "the request succeeded: $(wc -c <<<"$answer") bytes"

for name in agent server; do
  podman stop -t 20 "$name" >/dev/null
  [ "$(podman inspect -f '{{.State.ExitCode}}' "$name")" = 0 ] || { say "$name did not exit with 0"; podman logs "$name" | tail; exit 1; }
done
say "both containers exited with 0"
