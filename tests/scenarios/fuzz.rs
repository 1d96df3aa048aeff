//! Each decoder keeps its rules for its first inputs and for mutations of them.

use anyhow::{Result, ensure};
use tunnel_tests::fuzz::{FuzzTarget, TARGETS};

/// Declares the test of each target.
macro_rules! fuzz_tests {
    ($(fn $test:ident($name:literal);)+) => {
        $(#[test]
        fn $test() -> Result<()> {
            FuzzTarget::of_name($name)?.run()
        })+
    };
}

fuzz_tests! {
    fn fuzz_frames("frames");
    fn fuzz_control_messages("control_messages");
    fn fuzz_peer_messages("peer_messages");
    fn fuzz_enrollment_messages("enrollment_messages");
    fn fuzz_stream_messages("stream_messages");
    fn fuzz_cut_announcements("cut_announcements");
    fn fuzz_tokens("tokens");
    fn fuzz_pem_files("pem_files");
    fn fuzz_certificates_and_requests("certificates_and_requests");
    fn fuzz_dns_messages("dns_messages");
    fn fuzz_requests("requests");
    fn fuzz_chunked_bodies("chunked_bodies");
    fn fuzz_proxy_answers("proxy_answers");
    fn fuzz_cluster_nodes("cluster_nodes");
    fn fuzz_names("names");
    fn fuzz_configurations("configurations");
    fn fuzz_persisted_files("persisted_files");
}

#[test]
fn each_target_has_a_test_and_a_binary_for_cargo_fuzz() -> Result<()> {
    let (tests, manifest) = (include_str!("fuzz.rs"), include_str!("../fuzz/Cargo.toml"));
    for target in TARGETS {
        let name = target.name;
        let test = format!("fn fuzz_{name}(\"{name}\");");
        ensure!(tests.contains(&test), "{name} has no test");
        ensure!(
            manifest.contains(&format!("name = \"{name}\"\n")),
            "{name} has no binary"
        );
    }
    Ok(())
}
