//! Which files a program needs to start: its loader and its shared libraries, read out of it without running it.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};

use object::elf::{DT_NEEDED, DT_RPATH, DT_RUNPATH, FileHeader64, PT_INTERP};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};
use object::{Endianness, StringTable};

/// What the loader needs to start a program.
#[derive(Debug, Default)]
pub struct Libraries {
    /// The loader itself; `None` of a static program.
    pub loader: Option<PathBuf>,
    /// The libraries, those of the libraries too, and the loader's cache.
    pub readable: Vec<PathBuf>,
}

/// What a file says of itself.
#[derive(Debug, Default, PartialEq, Eq, Hash, Clone)]
struct Needs {
    loader: Option<PathBuf>,
    names: Vec<String>,
    folders: Vec<PathBuf>,
}

const CACHE: &str = "/etc/ld.so.cache";

/// Where loaders look beside their cache.
const FOLDERS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// The libraries of a program. Two programs that name the same get the same answer.
pub fn of(program: &Path) -> io::Result<Arc<Libraries>> {
    static KNOWN: OnceLock<Mutex<HashMap<Needs, Arc<Libraries>>>> = OnceLock::new();
    let needs = read(program)?;
    let mut known = KNOWN.get_or_init(Mutex::default).lock().expect("no panics while it is held");
    Ok(known.entry(needs.clone()).or_insert_with(|| Arc::new(resolve(needs))).clone())
}

fn read(file: &Path) -> io::Result<Needs> {
    parse(&fs::read(file)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", file.display())))
}

fn parse(data: &[u8]) -> object::Result<Needs> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let mut needs = Needs::default();
    for segment in header.program_headers(endian, data)? {
        if segment.p_type(endian) == PT_INTERP {
            let path = segment.data(endian, data).unwrap_or_default();
            needs.loader = Some(text(path.strip_suffix(&[0]).unwrap_or(path)).into());
        }
    }
    let sections = header.sections(endian, data)?;
    let Some((entries, link)) = sections.dynamic(endian, data)? else { return Ok(needs) };
    let strings = sections.strings(endian, data, link)?;
    for entry in entries {
        let value = || string(strings, entry.d_val(endian));
        match u32::try_from(entry.d_tag(endian)) {
            Ok(DT_NEEDED) => needs.names.extend(value()),
            Ok(DT_RPATH | DT_RUNPATH) => {
                let folders = value().unwrap_or_default();
                needs.folders.extend(folders.split(':').filter(|folder| folder.starts_with('/')).map(PathBuf::from));
            }
            _ => {}
        }
    }
    Ok(needs)
}

fn string(strings: StringTable, at: u64) -> Option<String> {
    Some(text(strings.get(u32::try_from(at).ok()?).ok()?))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn resolve(needs: Needs) -> Libraries {
    let cached = cached();
    let mut found = BTreeSet::from([PathBuf::from(CACHE)]);
    let mut waiting = vec![needs.clone()];
    while let Some(file) = waiting.pop() {
        for name in &file.names {
            let of_cache = cached.get(name).into_iter().flatten().cloned();
            let folders = file.folders.iter().cloned().chain(FOLDERS.map(PathBuf::from));
            let paths = of_cache.chain(folders.map(|folder| folder.join(name))).filter(|path| path.is_file());
            for path in paths.collect::<Vec<_>>() {
                if found.insert(path.clone()) {
                    waiting.extend(read(&path));
                }
            }
        }
    }
    Libraries { loader: needs.loader, readable: found.into_iter().collect() }
}

/// The libraries that the loader's cache names. One name can stand for several files, of several kinds of processors.
fn cached() -> HashMap<String, Vec<PathBuf>> {
    let listed = ["ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig"]
        .iter()
        .find_map(|program| Command::new(program).arg("-p").stdin(Stdio::null()).stderr(Stdio::null()).output().ok());
    let listed = listed.map(|output| text(&output.stdout)).unwrap_or_default();
    let mut found: HashMap<String, Vec<PathBuf>> = HashMap::new();
    for line in listed.lines() {
        // `	libm.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libm.so.6`
        if let (Some(name), Some((_, path))) = (line.split_whitespace().next(), line.split_once(" => ")) {
            found.entry(name.to_owned()).or_default().push(path.trim().into());
        }
    }
    found
}
