#!/usr/bin/env bash
# Runs static binaries of arm64 under qemu-user-static on another machine: `version`, an enrollment
# and a request over QUIC and over h2, in which the other end is a binary for this machine. Prints the
# sizes and the times.
#
#   tests/arm64.sh DIR ARM64-DIR     DIR contains tunnel-server and tunnel-agent for this machine,
#                                    ARM64-DIR those for arm64
#
# Exits with 77 and a reason on machines where the test cannot run. The test needs
# qemu-aarch64-static, curl and python3 (Debian: qemu-user-static), and no root.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/architecture.sh
here=$(this_architecture)
declare -A folders=([$here]=$1 [arm64]=$2)

skip() { echo "skip: $*"; exit 77; }
say() { echo "arm64-test: $*"; }
fail() {
  say "$*"
  tail -n 20 "$work"/*.log || true
  exit 1
}

[ "$here" != arm64 ] || skip "this machine runs arm64 itself: make images-test"
for program in qemu-aarch64-static curl python3; do command -v "$program" >/dev/null || skip "needs $program"; done
for folder in "$1" "$2"; do
  [ -x "$folder/tunnel-server" ] && [ -x "$folder/tunnel-agent" ] || skip "needs static binaries of amd64 and arm64: deploy/static.sh"
done

work=$(mktemp -d)
processes=() targets=
stop() {
  [ ${#processes[@]} -eq 0 ] || kill "${processes[@]}" 2>/dev/null || true
  [ ${#processes[@]} -eq 0 ] || wait "${processes[@]}" 2>/dev/null || true
  processes=()
}
trap 'stop; [ -z "$targets" ] || kill "$targets"; rm -rf "$work"' EXIT
trap 'fail "line $LINENO failed: $BASH_COMMAND"' ERR

# eventually COMMAND...: repeats a command until it succeeds, for 60 s.
eventually() {
  for _ in $(seq 600); do
    if "$@" >/dev/null 2>&1; then return 0; fi
    sleep 0.1
  done
  fail "does not succeed: $*"
}

# command_of PROGRAM ARCH: sets `command` to what runs a program of an architecture.
command_of() {
  local emulator
  emulator=$(runner "$2")
  command=(${emulator:+"$emulator"} "${folders[$2]}/$1")
}

# start NAME COMMAND...: starts a process that logs JSON to $work/NAME.log.
start() {
  local name=$1
  shift
  "$@" --log-format json --data-dir "$work/$name" >"$work/$name.log" 2>&1 &
  processes+=($!)
}

# port LOG LISTENER: prints the port of a listener.
port() { sed -n "s/.*\"listener\":\"$2\",\"address\":\"127.0.0.1:\([0-9]*\)\".*/\1/p" "$work/$1.log" | grep .; }

# exchange SERVER-ARCH AGENT-ARCH TRANSPORT: enrolls an agent at a server of other binaries, and reads
# a file of the target through both.
exchange() {
  local name=$1-$2-$3 agents http token build started=$SECONDS server agent
  command_of tunnel-server "$1"; server=("${command[@]}")
  command_of tunnel-agent "$2"; agent=("${command[@]}")
  mkdir -m 0700 "$work/server-$name" "$work/agent-$name"
  start "server-$name" "${server[@]}" run --kubernetes off --agent-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 \
    --https-listen off --meta-listen 127.0.0.1:0 --localhost-proxy-ports "$target"
  eventually port "server-$name" http
  agents=$(port "server-$name" agents)
  http=$(port "server-$name" http)
  token=$("${server[@]}" token create --data-dir "$work/server-$name" --node worker-1 2>/dev/null)
  install -m 0600 /dev/stdin "$work/token" <<<"$token"
  start "agent-$name" "${agent[@]}" run --server "127.0.0.1:$agents" --node-name worker-1 --token-file "$work/token" \
    --transport "$3" --meta-listen 127.0.0.1:0 --localhost-ports "$target"
  eventually curl -fsS --max-time 10 -o "$work/answer" -H "Host: worker-1:$target" "http://127.0.0.1:$http/served"
  cmp "$work/answer" "$work/target/served" || fail "the answer is not what the target has"
  [ -s "$work/agent-$name/agent.crt" ] || fail "the agent has no certificate: $(ls "$work/agent-$name")"
  build=$(curl -fsS "http://127.0.0.1:$(port "agent-$name" meta)/metrics" | grep -o '^tunnel_build_info{[^}]*}')
  say "server $1, agent $2, $3: enrolled, and a request succeeded; $((SECONDS - started)) s; $build"
  stop
}

for program in tunnel-server tunnel-agent; do
  [ "$(architecture "${folders[arm64]}/$program")" = arm64 ] || fail "${folders[arm64]}/$program is not for arm64"
  command_of "$program" arm64
  arm64=$("${command[@]}" version)
  command_of "$program" "$here"
  [ "$arm64" = "$("${command[@]}" version)" ] || fail "$program is of another version: $arm64"
  say "$arm64 for arm64: $(stat -c %s "${folders[arm64]}/$program") bytes, for $here $(stat -c %s "${folders[$here]}/$program")"
done
mkdir "$work/target"
head -c 1000000 /dev/urandom >"$work/target/served"
python3 -u -c '
import functools, http.server, sys
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
print(server.server_port)
server.serve_forever()' "$work/target" >"$work/port" 2>/dev/null &
targets=$!
eventually grep . "$work/port"
target=$(cat "$work/port")
for transport in quic h2; do
  exchange "$here" arm64 "$transport"
  exchange arm64 "$here" "$transport"
done
