//! The tunnel-agent binary: verbs and exit codes. All other code is in the library.

use std::io::Write;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Context;
use tracing::{info, warn};
use tunnel_agent::app::{App, RELOAD_PATH, check_environment, exit_code};
use tunnel_agent::cli::{
    self, CheckConfigArgs, Cli, Command, ConfigArgs, DiagArgs, DoctorArgs, HealthcheckArgs,
    JoinArgs, MetaArgs, ReloadArgs, RenderObject, StatusArgs,
};
use tunnel_agent::config::{self, Config, RawConfig};
use tunnel_agent::{address, diag, doctor, join, render, status};
use tunnel_process::command_line::{self, block_on, unknown_variables};
use tunnel_process::config_report::ConfigStatus;
use tunnel_process::diag::default_path;
use tunnel_process::meta::{MetaAddress, act};
use tunnel_process::metrics::COMMIT;
use tunnel_process::output::OutputFormat;
use tunnel_process::timers::record_runtime_start;
use tunnel_process::{notify, runtime, secrets, shutdown, telemetry, terminal};
use tunnel_proto::audit;

fn main() -> ExitCode {
    command_line::run(NAME, |cli: Cli| run_verb(cli.subcommand), exit_code)
}

fn run_verb(verb: Command) -> anyhow::Result<ExitCode> {
    match verb {
        Command::Run(source) => run(*source)?,
        Command::CheckConfig(arguments) => check_config(*arguments)?,
        Command::Join(arguments) => run_join(&arguments)?,
        Command::Healthcheck(arguments) => healthcheck(arguments)?,
        Command::Reload(arguments) => reload(arguments)?,
        Command::Status(arguments) => show_status(arguments)?,
        Command::Diag(arguments) => run_diag(*arguments)?,
        Command::Render { object } => render_object(&object)?,
        Command::Address { change } => address::change(&change)?,
        Command::Doctor(arguments) => return run_doctor(*arguments),
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut cli::command(), NAME, &mut script);
            print(&script)?;
        }
        Command::Version => print_line(concat!("tunnel-agent ", env!("CARGO_PKG_VERSION")))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn run(source: ConfigArgs) -> anyhow::Result<()> {
    let config = load(source)?;
    let log = &config.log;
    let _logs =
        telemetry::start(log.level, log.format, &log.access).context("cannot start logging")?;
    let _audit = audit::start(&log.audit, "agent").context("cannot start the audit log")?;
    telemetry::enable_recent_lines();
    let (version, commit) = (env!("CARGO_PKG_VERSION"), COMMIT);
    info!(node = %config.node_name, version, commit, "starting");
    if let Err(error) = secrets::forbid_core_dumps() {
        warn!(%error, "cannot disable core dumps; core dumps may contain keys");
    }
    for warning in &config.warnings {
        warn!("{warning}");
    }
    for variable in unknown_variables(config::ENV_PREFIX, &cli::command()) {
        warn!(variable, "unknown variable ignored");
    }
    record_runtime_start();
    let threads = Some(config.worker_threads);
    let runtime = runtime::build(threads)?;
    let ended = runtime.block_on(async {
        let app = App::start(config).await?;
        notify::started();
        let shutdown = app.shutdown().clone();
        shutdown::handle_signals(&shutdown, shutdown.drain())
            .context("cannot listen for signals")?;
        app.run().await?;
        anyhow::ensure!(
            !shutdown.has_listener_panicked(),
            "a listener panicked; see the log"
        );
        Ok(())
    });
    // A name lookup that hangs must not keep the process alive.
    runtime.shutdown_background();
    ended
}

fn check_config(arguments: CheckConfigArgs) -> anyhow::Result<()> {
    let source = arguments.source;
    let config = match config::load(source.settings, source.config.as_deref(), variable) {
        // Files of another host may be absent on this one.
        Err(error) if arguments.settings_only && !error.is_usage() => {
            writeln!(std::io::stderr(), "warning: {error}")?;
            return print_line("the settings are valid");
        }
        loaded => loaded?,
    };
    let unknown = unknown_variables(config::ENV_PREFIX, &cli::command());
    let unknown = unknown.iter();
    let unknown = unknown.map(|name| format!("unknown environment variable {name}"));
    for warning in config.warnings.iter().cloned().chain(unknown) {
        writeln!(std::io::stderr(), "warning: {warning}")?;
    }
    if !arguments.settings_only {
        check_environment(&config, is_running(&config)?)?;
    }
    let file = config.file.as_ref();
    let file = file.map_or_else(String::new, |file| format!(" ({})", file.path.display()));
    print_line(&format!("configuration is valid{file}"))
}

/// Returns whether an agent answers at the meta port. Its listeners have the addresses.
fn is_running(config: &Config) -> anyhow::Result<bool> {
    let address = config::meta_endpoint(&config.raw.0)?;
    Ok(block_on(address.get("/livez"))?.is_ok())
}

fn load(source: ConfigArgs) -> anyhow::Result<Config> {
    Ok(config::load(
        source.settings,
        source.config.as_deref(),
        variable,
    )?)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn run_diag(arguments: DiagArgs) -> anyhow::Result<()> {
    let source = arguments.source;
    let settings = config::layers(source.settings, source.config.as_deref(), variable);
    let document = block_on(diag::collect(settings))?;
    let path = arguments.file;
    let path = path.unwrap_or_else(|| default_path(NAME, SystemTime::now()));
    document
        .write(&path)
        .context("cannot write the facts; give another file with --file")
}

fn run_join(arguments: &JoinArgs) -> anyhow::Result<()> {
    let print = |text: &str| telemetry::print(text.as_bytes());
    Ok(block_on(join::run(arguments, terminal::ask, print))??)
}

fn run_doctor(arguments: DoctorArgs) -> anyhow::Result<ExitCode> {
    let DoctorArgs { options, source } = arguments;
    if let Some(id) = &options.explain {
        doctor::explain(id, options.output).context(NO_OUTPUT)?;
        return Ok(ExitCode::SUCCESS);
    }
    let config = load(source)?;
    let code = block_on(doctor::run(&config, &options))?;
    Ok(code.context(NO_OUTPUT)?.into())
}

fn healthcheck(arguments: HealthcheckArgs) -> anyhow::Result<()> {
    let address = meta_address(arguments.meta)?;
    let path = match arguments.live {
        true => "/livez",
        false => "/readyz?verbose",
    };
    let (status, body) = block_on(address.get(path))?
        .with_context(|| format!("no answer from the agent at {address}"))?;
    print(body.as_bytes())?;
    anyhow::ensure!(status.is_success(), "agent is not ready");
    Ok(())
}

fn show_status(arguments: StatusArgs) -> anyhow::Result<()> {
    let address = meta_address(arguments.meta)?;
    let status = block_on(status::ask(&address))?
        .with_context(|| format!("no answer from the agent at {address}"))?;
    let text = match arguments.output {
        OutputFormat::Table => status.table,
        OutputFormat::Json => status.json,
    };
    print(text.as_bytes())?;
    anyhow::ensure!(status.is_connected, "agent has no session");
    Ok(())
}

fn render_object(object: &RenderObject) -> anyhow::Result<()> {
    let RenderObject::EdgeApiserver(arguments) = object;
    print(render::edge_apiserver(arguments)?.as_bytes())
}

fn reload(arguments: ReloadArgs) -> anyhow::Result<()> {
    let flags = RawConfig {
        data_dir: arguments.data_dir,
        meta_socket: arguments.meta_socket,
        ..RawConfig::default()
    };
    let settings = config::layers(flags, arguments.config.as_deref(), |_| None)?;
    let socket = config::meta_socket(&settings);
    let (_, status) = block_on(act(&socket, RELOAD_PATH))?
        .with_context(|| format!("no answer from the agent at {}", socket.display()))?;
    let status: ConfigStatus = serde_json::from_str(&status).context("not the agent's answer")?;
    match arguments.output {
        OutputFormat::Table => print(status.table().as_bytes())?,
        OutputFormat::Json => print_line(&serde_json::to_string_pretty(&status)?)?,
    }
    Ok(status.check()?)
}

/// Returns where a running agent is asked.
fn meta_address(arguments: MetaArgs) -> anyhow::Result<MetaAddress> {
    let flags = RawConfig {
        data_dir: arguments.data_dir,
        meta_listen: arguments.meta_listen,
        meta_socket: arguments.meta_socket,
        ..RawConfig::default()
    };
    let settings = config::layers(flags, arguments.config.as_deref(), |_| None)?;
    Ok(config::meta_endpoint(&settings)?)
}

fn print_line(line: &str) -> anyhow::Result<()> {
    print(format!("{line}\n").as_bytes())
}

fn print(text: &[u8]) -> anyhow::Result<()> {
    telemetry::print(text).context(NO_OUTPUT)
}

const NAME: &str = "tunnel-agent";
const NO_OUTPUT: &str = "cannot write to standard output";
