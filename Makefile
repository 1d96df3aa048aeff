# Each target runs a few commands that can also be typed by hand. `make help` lists the targets.

ARGS ?=
ROUNDS ?= 5
GEAR ?= full
SEEDS ?= 1,2,3
OVERLAY ?= plain
MINUTES ?= 30
SEED ?= 1

# The packages that `make test` builds. Another selection would have other features, and cargo would compile crates again.
PACKAGES := -p tunnel-ca -p tunnel-dns -p tunnel-doctor -p tunnel-networks -p tunnel-process -p tunnel-proto -p tunnel-routing -p tunnel-scale -p tunnel-store -p tunnel-tables -p tunnel-server -p tunnel-agent -p tunnel-tests

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all faults soak bench bench-compare bench-guards lint audit docs tools static images images-test packages packages-test upgrade-test dist dist-test arm64-test cluster-test release manifests install-yaml chart

help: ## lists the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

demo: ## runs the guided tour; ARGS=--once checks each answer and exits
	@tests/tools.sh demo
	cargo build $(PACKAGES) -p tunnel-demo --bin tunnel-server --bin tunnel-agent --bin fakes --bin demo
	@target=$${CARGO_TARGET_DIR:-target}; exec $$target/debug/demo $(ARGS)

check: ## checks formatting, clippy, and the tests that end within 5 s and need no root; for use while you work
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	@tests/run.sh check $(ARGS)

test: tools ## runs all tests and lists those that were skipped because this machine lacks a program or a right
	@tests/run.sh test $(ARGS)

test-all: ## runs all tests with full timers, all seeds and millions of fuzz inputs, faults, images, packages, benchmark; takes hours
	@tests/tools.sh full
	@tests/run.sh test-all
	$(MAKE) faults images-test packages-test upgrade-test arm64-test cluster-test bench-guards bench

faults: ## runs the fault matrix with full timers, about 15 minutes; ONLY=F06,F14 SEEDS=1,2,3 GEAR=quick
	cargo build --release --bins
	@echo "load: $$(cat /proc/loadavg)"
	CULVERT_TEST_GEAR=$(GEAR) CULVERT_TEST_SEEDS=$(SEEDS) cargo nextest run --release --profile faults \
	  --test scenarios --run-ignored all -E "test(/^(faults|cluster::restarts)::.*($$(echo '$(ONLY)' | tr 'A-Z,' 'a-z|'))/) - test(/^faults::soak::/)" $(ARGS)

soak: ## runs mixed faults on three servers for 30 minutes; MINUTES=30 SEED=1
	cargo build --release --bins
	CULVERT_SOAK_MINUTES=$(MINUTES) CULVERT_TEST_SEEDS=$(SEED) cargo test --release -p tunnel-tests --test scenarios \
	  -- --ignored --nocapture faults::soak::

bench: ## runs the benchmark, about 17 minutes; CASE=1,8 ROUNDS=5 RATHOLE=path BINARIES=DIR; FULL=1 measures what images carry and takes longer
	cargo build --release -p tunnel-server -p tunnel-agent -p tunnel-bench --bin tunnel-server --bin tunnel-agent --bin bench
	@set -e; target=$${CARGO_TARGET_DIR:-target}; binaries=$${BINARIES:-$(if $(FULL),$$(deploy/static.sh))}; \
	  report=$$(env $${binaries:+CULVERT_BIN_DIR="$$binaries"} $$target/release/bench run --rounds $(ROUNDS) \
	    $(if $(CASE),--case $(CASE)) $(if $(FULL),--full) $(if $(RATHOLE),--rathole $(RATHOLE)) $(ARGS)); \
	  exec python3 tests/bench/report.py show "$$report"

bench-compare: ## compares target/bench/report.json with an older report, BASE=file; exits with 1 when CPU time (as a ratio to the floor), memory or failures became worse
	@exec python3 tests/bench/report.py compare $(BASE)

bench-guards: ## counts instructions and allocations of parts of a request with valgrind, and compares them with limits
	cargo build --release -p tunnel-bench --bin bench
	@target=$${CARGO_TARGET_DIR:-target}; exec $$target/release/bench guards

lint: ## checks formatting, clippy, documentation and the dependencies of each crate
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items --locked
	cargo check -p tunnel-proto -p tunnel-routing --no-default-features --locked

audit: ## checks licenses, banned crates, sources, advisories and unused dependencies; installs cargo-deny and cargo-machete
	@tests/audit.sh

docs: ## generates the reference of settings, metrics and log fields from the code
	cargo run --bin reference

static: ## builds the two binaries for images and packages, static and small (about 12 minutes of one core)
	@deploy/static.sh

images: ## builds both container images with docker, buildah or podman; PREFIX=registry.example.com/ TAG=0.1.0 BINARIES=DIR
	@deploy/images.sh

images-test: static ## builds the images, runs them hardened with podman, and tests health, an enrollment and a request
	@tests/images.sh "$$(deploy/static.sh 2>/dev/null)" || { code=$$?; [ $$code -eq 77 ] || exit $$code; }

packages: ## builds the Debian packages of both programs and SHA256SUMS; BINARIES=DIR ARCH=arm64 OUT=target/packages
	@deploy/packages.sh

packages-test: ## builds the packages, and installs, upgrades, removes and purges them under a systemd of their own; BINARIES=DIR
	@tests/packages.sh "$${BINARIES:-$$(deploy/static.sh 2>/dev/null)}" || { code=$$?; [ $$code -eq 77 ] || exit $$code; }

upgrade-test: ## upgrades a server and an agent from the previous release and back under 100 requests/s; REV=REVISION or OLD=DIR
	cargo build -p tunnel-server -p tunnel-agent
	@tests/upgrade.py "$${CARGO_TARGET_DIR:-target}/debug" $(if $(REV),--rev $(REV)) $(if $(OLD),--old $(OLD)) || \
	  { code=$$?; [ $$code -eq 77 ] || exit $$code; }

dist: ## builds all files of a release in target/dist: binaries, packages, images, bills of materials, checksums; ARCH=arm64 VERSION=0.1.0 BINARIES=DIR
	@deploy/dist.sh

dist-test: ## checks that the files in target/dist are complete, of one version and commit, and within their sizes; ARCH=arm64 OUT=DIR
	@exec python3 tests/dist.py "$${OUT:-$${CARGO_TARGET_DIR:-target}/dist}" $(ARCH)

arm64-test: ## runs the binaries for arm64 under qemu, through an enrollment and a request at those for this machine; BINARIES=DIR as for dist
	@here=$${BINARIES:+$$BINARIES/amd64} arm64=$${BINARIES:+$$BINARIES/arm64}; \
	{ arm64=$${arm64:-$$(deploy/static.sh aarch64-unknown-linux-gnu)} && here=$${here:-$$(deploy/static.sh)} && \
	  tests/arm64.sh "$$here" "$$arm64"; } || { code=$$?; [ $$code -eq 77 ] || exit $$code; }

cluster-test: ## runs three servers and two edges in a real Kubernetes with kube-proxy, about 8 minutes, as root; ROWS=1,9 KUBEBUILDER_ASSETS=DIR
	cargo build $(PACKAGES) --bins
	@CULVERT_BIN_DIR=$${CULVERT_BIN_DIR:-$${CARGO_TARGET_DIR:-target}/debug} python3 tests/cluster $(if $(ROWS),--rows $(ROWS)) $(ARGS) || \
	  { code=$$?; [ $$code -eq 77 ] || exit $$code; }

release: ## makes the commit and the tag of a release after all checks, and pushes nothing; VERSION=0.1.0 ARGS=--dry-run
	@deploy/release.sh "$(VERSION)" $(ARGS)

manifests: tools ## renders an overlay with the images of your registry; PREFIX=registry.example.com/culvert/ TAG=0.1.0 SERVER=HOST:PORT OVERLAY=plain
	@mkdir -p $${CARGO_TARGET_DIR:-target}/manifests
	@deploy/manifests.sh $(OVERLAY) $${CARGO_TARGET_DIR:-target}/manifests/$(OVERLAY).yaml

install-yaml: tools ## renders deploy/manifests/install.yaml, whose images have a name that cannot be pulled
	@deploy/manifests.sh --checked-in

chart: tools ## makes the templates of deploy/chart from deploy/manifests
	@deploy/chart.sh

tools: ## installs the programs that tests run against: Prometheus, node_exporter, kubectl, curl, dig, ip, nft
	@tests/tools.sh
