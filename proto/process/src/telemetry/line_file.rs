//! A file of lines. It begins again when its path no longer leads to it, is replaced when it is full,
//! and has no part of a line that did not fit on the disk.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// When a file is full, and what becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotation {
    /// Largest size of the file, in bytes. Only a single line may be longer.
    pub max_bytes: u64,
    /// Full files that are retained, as `PATH.1`, the last one, to `PATH.N`.
    pub backups: u32,
}

/// A file to which lines are appended.
#[derive(Debug)]
pub(super) struct LineFile {
    path: PathBuf,
    rotation: Option<Rotation>,
    file: File,
    length: u64,
    /// Length up to the end of the last complete line.
    complete: u64,
}

impl LineFile {
    /// Opens or creates the file. A line that a killed process left unfinished is ended.
    ///
    /// # Errors
    /// When the file cannot be opened. The text names `setting` and the file.
    pub(super) fn open(setting: &str, path: &Path, rotation: Option<Rotation>) -> io::Result<Self> {
        let open = || {
            let mut file = append(path)?;
            if is_unfinished(path)? {
                file.write_all(b"\n")?;
            }
            let length = file.metadata()?.len();
            Ok(Self {
                path: path.to_owned(),
                rotation,
                file,
                length,
                complete: length,
            })
        };
        open().map_err(|error: io::Error| {
            let text = format!("{setting}: cannot open {}: {error}", path.display());
            io::Error::new(error.kind(), text)
        })
    }

    /// Follows what others did with the file: they may have moved, removed or truncated it.
    fn follow(&mut self) -> io::Result<()> {
        let own = self.file.metadata()?;
        let is_own = fs::metadata(&self.path)
            .is_ok_and(|at_path| (at_path.dev(), at_path.ino()) == (own.dev(), own.ino()));
        if !is_own {
            return self.begin();
        }
        if own.len() < self.length {
            (self.length, self.complete) = (own.len(), own.len());
        }
        Ok(())
    }

    fn begin(&mut self) -> io::Result<()> {
        self.file = append(&self.path)?;
        self.length = self.file.metadata()?.len();
        self.complete = self.length;
        Ok(())
    }

    /// Moves the file away and begins a new one. The oldest one is deleted.
    fn rotate(&mut self, backups: u32) -> io::Result<()> {
        if backups == 0 {
            fs::remove_file(&self.path)?;
        }
        for number in (1..=backups).rev() {
            let from = match number {
                1 => self.path.clone(),
                _ => self.backup(number - 1),
            };
            match fs::rename(from, self.backup(number)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        self.begin()
    }

    fn backup(&self, number: u32) -> PathBuf {
        let mut path = OsString::from(&self.path);
        path.push(format!(".{number}"));
        path.into()
    }

    /// Returns how much of `data`, which begins at the begin of a line, is written before the next
    /// check, and makes room for it.
    fn make_room(&mut self, data: &[u8]) -> io::Result<usize> {
        let Some(rotation) = self.rotation else {
            return Ok(data.len());
        };
        let fitting = |length: u64| {
            let room = rotation.max_bytes.saturating_sub(length);
            let room = usize::try_from(room).unwrap_or(usize::MAX).min(data.len());
            data.get(..room).and_then(end_of_lines)
        };
        if let Some(end) = fitting(self.length) {
            return Ok(end);
        }
        if self.length > 0 {
            self.rotate(rotation.backups)?;
        }
        Ok(fitting(0).unwrap_or_else(|| first_line(data)))
    }
}

impl Write for LineFile {
    /// Writes lines, or the rest of one. Leaves out an empty line.
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let length = if self.length == self.complete {
            if data == b"\n" {
                return Ok(1);
            }
            self.follow()?;
            self.make_room(data)?
        } else {
            first_line(data)
        };
        match self.file.write(data.get(..length).unwrap_or(data)) {
            Ok(count) => {
                let written = data.get(..count).and_then(end_of_lines);
                if let Some(end) = written {
                    self.complete = self.length + end as u64;
                }
                self.length += count as u64;
                Ok(count)
            }
            Err(error) => {
                if self.length > self.complete && self.file.set_len(self.complete).is_ok() {
                    self.length = self.complete;
                }
                Err(error)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn append(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(FILE_MODE);
    options.open(path)
}

/// Returns whether a regular file ends inside a line.
fn is_unfinished(path: &Path) -> io::Result<bool> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Ok(false);
    }
    let mut last = [0];
    File::open(path)?.read_exact_at(&mut last, metadata.len() - 1)?;
    Ok(last != *b"\n")
}

/// Returns the length of the complete lines at the begin of `data`, if there are some.
fn end_of_lines(data: &[u8]) -> Option<usize> {
    let last = data.iter().rposition(|byte| *byte == b'\n');
    last.map(|index| index + 1)
}

fn first_line(data: &[u8]) -> usize {
    let end = data.iter().position(|byte| *byte == b'\n');
    end.map_or(data.len(), |index| index + 1)
}

/// Mode of a new file: the lines name callers, nodes and paths.
const FILE_MODE: u32 = 0o640;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::ScratchDir;

    fn lines(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_default()
    }

    #[test]
    fn full_files_are_retained_up_to_their_number_and_no_line_is_split() {
        let dir = ScratchDir::new().unwrap();
        let path = dir.path().join("audit.log");
        let rotation = Some(Rotation {
            max_bytes: 20,
            backups: 2,
        });
        let mut file = LineFile::open("--x", &path, rotation).unwrap();
        // Two lines of 9 bytes fit; a batch is divided between lines.
        let batch = "line-001\nline-002\nline-003\nline-004\nline-005\nline-006\nline-007\n";
        file.write_all(batch.as_bytes()).unwrap();
        file.write_all(b"a line that is longer than a file\n")
            .unwrap();
        let backup = |number| lines(&file.backup(number));
        assert_eq!(lines(&path), "a line that is longer than a file\n");
        assert_eq!(backup(1), "line-007\n");
        assert_eq!(backup(2), "line-005\nline-006\n");
        assert_eq!(backup(3), "");
    }

    #[test]
    fn file_that_others_moved_or_truncated_begins_again() {
        let dir = ScratchDir::new().unwrap();
        let path = dir.path().join("access.log");
        fs::write(&path, "unfinished").unwrap();
        let mut file = LineFile::open("--x", &path, None).unwrap();
        file.write_all(b"1\n").unwrap();
        assert_eq!(lines(&path), "unfinished\n1\n");
        fs::rename(&path, dir.path().join("moved")).unwrap();
        file.write_all(b"2\n").unwrap();
        assert_eq!(lines(&path), "2\n");
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(0)
            .unwrap();
        file.write_all(b"3\n").unwrap();
        assert_eq!(lines(&path), "3\n");
        fs::remove_file(&path).unwrap();
        file.write_all(b"4\n").unwrap();
        assert_eq!(lines(&path), "4\n");
    }
}
