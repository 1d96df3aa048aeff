//! The binary: picks a verb and turns its end into an exit code.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use tracing::warn;
use tunnel_proto::process::host::raise_descriptor_limit;
use tunnel_proto::process::secrets::forbid_core_dumps;
use tunnel_proto::process::settings::{ConfigError, unknown_variables};
use tunnel_proto::process::shutdown::{Shutdown, on_signals};
use tunnel_proto::process::telemetry;
use tunnel_server::admin::verbs::VerbError;
use tunnel_server::app::App;
use tunnel_server::cli::{Cli, Source, Verb, command};
use tunnel_server::config::{self, Config, ENV_PREFIX, known_variables};

/// glibc's allocator keeps what a flood took; this one gives it back within seconds. `.cargo/config.toml` has its options.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Usage or configuration (EX_USAGE of sysexits.h).
const EXIT_USAGE: u8 = 64;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(told) => {
            let _nowhere_to_print = told.print();
            return if told.use_stderr() {
                ExitCode::from(EXIT_USAGE)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    match act(cli.verb) {
        Ok(code) => code,
        Err(error) => {
            telemetry::print_error(&format!("tunnel-server: {error:#}"));
            ExitCode::from(exit_code(&error))
        }
    }
}

fn act(verb: Verb) -> anyhow::Result<ExitCode> {
    match verb {
        Verb::Run(source) => run(*source),
        Verb::CheckConfig(source) => {
            let config = load(*source)?;
            for warning in &config.warnings {
                writeln!(std::io::stderr(), "warning: {warning}")?;
            }
            writeln!(std::io::stdout(), "configuration is valid")?;
            Ok(ExitCode::SUCCESS)
        }
        Verb::Token(verb) => ask(verb.run()),
        Verb::Nodes(arguments) => ask(arguments.run()),
        Verb::Ca(arguments) => ask(arguments.run()),
        Verb::Connect(arguments) => ask(arguments.run()),
        Verb::Healthcheck(arguments) => ask(arguments.run()),
        Verb::Completion { shell } => {
            clap_complete::generate(
                shell,
                &mut command(),
                "tunnel-server",
                &mut std::io::stdout(),
            );
            Ok(ExitCode::SUCCESS)
        }
        Verb::Version => {
            writeln!(
                std::io::stdout(),
                "tunnel-server {}",
                env!("CARGO_PKG_VERSION")
            )?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// 64 when the person at the keyboard can mend it, else 1.
fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<VerbError>() {
        return error.exit_code();
    }
    if error.chain().any(|cause| cause.is::<ConfigError>()) {
        EXIT_USAGE
    } else {
        1
    }
}

/// Runs a short verb on a small runtime.
fn ask(verb: impl Future<Output = Result<(), VerbError>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(verb);
    // A thread may still wait for standard input.
    runtime.shutdown_background();
    done?;
    Ok(ExitCode::SUCCESS)
}

fn load(source: Source) -> anyhow::Result<Config> {
    Ok(config::load(source.settings, source.config.as_deref())?)
}

fn run(source: Source) -> anyhow::Result<ExitCode> {
    let config = load(source)?;
    let _logs = telemetry::start(config.log_level, config.log_format)?;
    if let Err(error) = forbid_core_dumps() {
        warn!(%error, "cannot forbid core dumps; they would hold keys");
    }
    if let Err(error) = raise_descriptor_limit() {
        warn!(%error, "cannot raise the limit of open files");
    }
    for name in unknown_variables(ENV_PREFIX, &known_variables(&command())) {
        warn!(
            name,
            "environment variable has no meaning here and is ignored"
        );
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let shutdown = Shutdown::new();
        on_signals(&shutdown)?;
        App::start(config, shutdown.clone()).await?.run().await;
        anyhow::ensure!(!shutdown.is_broken(), "a listener was lost");
        Ok(ExitCode::SUCCESS)
    })
}
