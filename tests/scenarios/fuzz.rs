//! Each decoder keeps its rules for its first inputs and for mutations of them.

use anyhow::{Result, ensure};
use tunnel_tests::fuzz::{FuzzTarget, TARGETS};

#[test]
fn fuzz_frames() -> Result<()> {
    FuzzTarget::of_name("frames")?.run()
}

#[test]
fn fuzz_control_messages() -> Result<()> {
    FuzzTarget::of_name("control_messages")?.run()
}

#[test]
fn fuzz_enrollment_messages() -> Result<()> {
    FuzzTarget::of_name("enrollment_messages")?.run()
}

#[test]
fn fuzz_stream_messages() -> Result<()> {
    FuzzTarget::of_name("stream_messages")?.run()
}

#[test]
fn fuzz_tokens() -> Result<()> {
    FuzzTarget::of_name("tokens")?.run()
}

#[test]
fn fuzz_pem_files() -> Result<()> {
    FuzzTarget::of_name("pem_files")?.run()
}

#[test]
fn fuzz_certificates_and_requests() -> Result<()> {
    FuzzTarget::of_name("certificates_and_requests")?.run()
}

#[test]
fn fuzz_dns_messages() -> Result<()> {
    FuzzTarget::of_name("dns_messages")?.run()
}

#[test]
fn fuzz_requests() -> Result<()> {
    FuzzTarget::of_name("requests")?.run()
}

#[test]
fn fuzz_proxy_answers() -> Result<()> {
    FuzzTarget::of_name("proxy_answers")?.run()
}

#[test]
fn fuzz_cluster_nodes() -> Result<()> {
    FuzzTarget::of_name("cluster_nodes")?.run()
}

#[test]
fn fuzz_names() -> Result<()> {
    FuzzTarget::of_name("names")?.run()
}

#[test]
fn fuzz_configurations() -> Result<()> {
    FuzzTarget::of_name("configurations")?.run()
}

#[test]
fn fuzz_persisted_files() -> Result<()> {
    FuzzTarget::of_name("persisted_files")?.run()
}

#[test]
fn each_target_has_a_test_and_a_binary_for_cargo_fuzz() -> Result<()> {
    let (tests, manifest) = (include_str!("fuzz.rs"), include_str!("../fuzz/Cargo.toml"));
    for target in TARGETS {
        let name = target.name;
        let test =
            format!("fn fuzz_{name}() -> Result<()> {{\n    FuzzTarget::of_name(\"{name}\")");
        ensure!(tests.contains(&test), "{name} has no test");
        ensure!(
            manifest.contains(&format!("name = \"{name}\"\n")),
            "{name} has no binary"
        );
    }
    Ok(())
}
