# Sourced by the scripts that run podman: a store of its own, so that nothing changes in that of the
# machine.

# podman_store DIR: makes a store in a folder, which podman uses from then on.
podman_store() {
  mkdir -p "$1"/{graph,run,tmp,networks}
  export CONTAINERS_STORAGE_CONF=$1/storage.conf CONTAINERS_CONF=$1/containers.conf
  cat >"$CONTAINERS_STORAGE_CONF" <<END
[storage]
driver = "vfs"
graphroot = "$1/graph"
runroot = "$1/run"
END
  cat >"$CONTAINERS_CONF" <<END
[engine]
runtime = "$(command -v runc || echo runc)"
cgroup_manager = "cgroupfs"
events_logger = "none"
tmp_dir = "$1/tmp"
[network]
network_backend = "netavark"
network_config_dir = "$1/networks"
END
}
