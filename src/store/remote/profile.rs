//! AWS profiles: `~/.aws/credentials` and `~/.aws/config`, which object_store doesn't read.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use super::{RemoteError, Surroundings};

/// A section's keys; `parent.key` for keys indented below another one.
type Section = BTreeMap<String, String>;

/// One profile, out of both files. Holds secrets, hence no `Debug`.
pub(super) struct Profile {
    name: String,
    values: Section,
    endpoint: Option<String>,
    files: Vec<PathBuf>,
}

/// Where a profile's credentials come from.
pub(super) enum Credentials<'a> {
    Keys {
        id: &'a str,
        secret: &'a str,
        token: Option<&'a str>,
    },
    /// A command that prints them.
    Process(&'a str),
    WebIdentity {
        token_file: &'a str,
        role: &'a str,
        session: Option<&'a str>,
    },
}

/// How errors call it.
impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "profile `{}`", self.name)?;
        let files: Vec<String> = self.files.iter().map(|file| file.display().to_string()).collect();
        if files.is_empty() { Ok(()) } else { write!(f, " ({})", files.join(", ")) }
    }
}

impl Profile {
    /// The profile of AWS_PROFILE, else the one that is called `default`, which need not be there.
    pub(super) fn find(here: &Surroundings) -> Result<Self, RemoteError> {
        let named = here.variable("AWS_PROFILE");
        let name = named.unwrap_or("default").to_owned();
        let place = |variable: &str, default: &str| match here.variable(variable) {
            Some(file) => Some(match file.strip_prefix("~/") {
                Some(rest) => here.home()?.join(rest),
                None => PathBuf::from(file),
            }),
            None => Some(here.home()?.join(default)),
        };
        let config_file = place("AWS_CONFIG_FILE", ".aws/config");
        let credentials_file = place("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials");
        let mut config = read(config_file.as_ref())?;
        let mut credentials = read(credentials_file.as_ref())?;
        let in_config = config.remove(&format!("profile {name}"));
        let in_config = in_config.or_else(|| (name == "default").then(|| config.remove("default")).flatten());
        let in_credentials = credentials.remove(&name);
        let files: Vec<PathBuf> = credentials_file.into_iter().chain(config_file).collect();
        if named.is_some() && in_config.is_none() && in_credentials.is_none() {
            let empty = Self { name, values: Section::new(), endpoint: None, files };
            let error = RemoteError::new(format!("AWS_PROFILE: there is no {empty}"));
            return Err(error.hint("`aws configure list-profiles` lists what there is"));
        }
        // The AWS command line takes keys from the file for credentials where both have them.
        let mut values = in_config.unwrap_or_default();
        values.extend(in_credentials.unwrap_or_default());
        let services = values.get("services").and_then(|name| config.remove(&format!("services {name}")));
        let endpoint = services.and_then(|mut services| services.remove("s3.endpoint_url"));
        let endpoint = endpoint.or_else(|| values.get("endpoint_url").cloned());
        Ok(Self { name, values, endpoint, files })
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(super) fn region(&self) -> Option<&str> {
        self.get("region")
    }

    pub(super) fn endpoint(&self) -> Option<&str> {
        self.endpoint.as_deref().filter(|endpoint| !endpoint.is_empty())
    }

    /// Where the credentials come from; none where the profile names none.
    pub(super) fn credentials(&self) -> Result<Option<Credentials<'_>>, RemoteError> {
        if let (Some(token_file), Some(role)) = (self.get("web_identity_token_file"), self.get("role_arn")) {
            return Ok(Some(Credentials::WebIdentity { token_file, role, session: self.get("role_session_name") }));
        }
        // A role that is assumed goes before keys, which then are those that assume it.
        if self.get("role_arn").is_some() {
            return Err(self.needs("assumes a role"));
        }
        match (self.get("aws_access_key_id"), self.get("aws_secret_access_key")) {
            (Some(id), Some(secret)) => {
                return Ok(Some(Credentials::Keys { id, secret, token: self.get("aws_session_token") }));
            }
            (None, None) => {}
            _ => {
                let error = RemoteError::new(format!("{self} has one of two keys"));
                return Err(error.hint("it needs aws_access_key_id and aws_secret_access_key"));
            }
        }
        if let Some(command) = self.get("credential_process") {
            return Ok(Some(Credentials::Process(command)));
        }
        if self.get("sso_session").is_some() || self.get("sso_start_url").is_some() {
            return Err(self.needs("signs in through SSO"));
        }
        if self.get("login_session").is_some() {
            return Err(self.needs("signs in through the console"));
        }
        Ok(None)
    }

    fn needs(&self, what: &str) -> RemoteError {
        let error = RemoteError::new(format!("{self} {what}, which only the AWS command line does"));
        let name = &self.name;
        error.hint(format!("let it: eval \"$(aws configure export-credentials --profile {name} --format env)\""))
    }
}

fn read(file: Option<&PathBuf>) -> Result<BTreeMap<String, Section>, RemoteError> {
    let Some(file) = file else { return Ok(BTreeMap::new()) };
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(parse(&text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(RemoteError::new(format!("{}: {error}", file.display()))
            .hint("AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE name other files")),
    }
}

/// Reads the AWS flavour of INI as the command line does: `#` and `;` start comments only at the start of a line, keys
/// are lower case, and what is indented below a key without a value belongs to it. Lines that make no sense are passed over.
pub(super) fn parse(text: &str) -> BTreeMap<String, Section> {
    let mut sections: BTreeMap<String, Section> = BTreeMap::new();
    let mut section: Option<String> = None;
    let mut parent: Option<String> = None;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            let name = section_name(name);
            sections.entry(name.clone()).or_default();
            (section, parent) = (Some(name), None);
            continue;
        }
        let (Some(section), Some((key, value))) = (&section, trimmed.split_once('=')) else { continue };
        let (key, value) = (key.trim().to_ascii_lowercase(), value.trim().to_owned());
        let indented = line.starts_with([' ', '\t']);
        let key = match &parent {
            Some(parent) if indented => format!("{parent}.{key}"),
            _ => {
                parent = value.is_empty().then(|| key.clone());
                key
            }
        };
        sections.entry(section.clone()).or_default().insert(key, value);
    }
    sections
}

/// `profile  "my name"` → `profile my name`.
fn section_name(name: &str) -> String {
    let name = name.trim();
    match name.split_once(char::is_whitespace) {
        Some((kind @ ("profile" | "services" | "sso-session"), rest)) => {
            let rest = rest.trim();
            let quoted = |quote: char| rest.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
            format!("{kind} {}", quoted('"').or_else(|| quoted('\'')).unwrap_or(rest))
        }
        _ => name.to_owned(),
    }
}
