//! A pseudoterminal, as a person sees it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;

use anyhow::{Result, ensure};
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

/// The person's end of a pseudoterminal, which is no controlling terminal.
#[derive(Debug)]
pub struct Terminal(File);

impl Terminal {
    /// Opens a pseudoterminal. Returns the end of a program, too.
    pub fn open() -> Result<(Self, OwnedFd)> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let person = openpt(flags)?;
        unlockpt(&person)?;
        let program = ioctl_tiocgptpeer(&person, flags)?;
        Ok((Self(File::from(person)), program))
    }

    pub fn write(&mut self, typed: &[u8]) -> Result<()> {
        Ok(self.0.write_all(typed)?)
    }

    /// Reads until `text`. Blocks the thread until then, or until the last program has closed the
    /// terminal, which is an error.
    pub fn read_until(&mut self, text: &str) -> Result<()> {
        let mut shown = Vec::new();
        while !shown.ends_with(text.as_bytes()) {
            let mut byte = [0];
            self.0.read_exact(&mut byte)?;
            shown.extend_from_slice(&byte);
        }
        Ok(())
    }

    /// Reads until the last program has closed the terminal. Blocks the thread.
    pub fn read_rest(mut self) -> Result<String> {
        let mut shown = Vec::new();
        // On Linux the end is this error.
        if let Err(error) = self.0.read_to_end(&mut shown) {
            let code = error.raw_os_error();
            ensure!(code == Some(Errno::IO.raw_os_error()), "{error}");
        }
        Ok(String::from_utf8_lossy(&shown).into_owned())
    }

    /// Returns whether typed characters are shown, and whether Ctrl-C sends a signal.
    pub fn modes(&self) -> Result<(bool, bool)> {
        let modes = tcgetattr(&self.0)?.local_modes;
        let has = |mode| modes.contains(mode);
        Ok((has(LocalModes::ECHO), has(LocalModes::ISIG)))
    }

    pub fn into_file(self) -> File {
        self.0
    }
}
