//! Compiles `tunnel.proto` in pure Rust (protox), so that no protoc is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=tunnel.proto");
    let descriptors = protox::compile(["tunnel.proto"], ["."])?;
    prost_build::Config::new()
        .skip_debug(["culvert.v1.EnrollRequest"])
        .type_attribute(
            ".",
            "#[allow(missing_docs, clippy::use_self, reason = \"generated\")]",
        )
        .compile_fds(descriptors)?;
    Ok(())
}
