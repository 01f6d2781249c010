//! Inputs from outside of the pipeline: files, URLs and tagged artifacts.

use cuda_agent_protocol::PortType;

use super::substitute::Scope;
use super::wires::{Found, Sources, Wiring};
use crate::name::is_tag_part;
use crate::spec::document::Spot;
use crate::spec::error::Problem;
use crate::spec::raw::External;
use crate::spec::types::Source;

impl Wiring<'_> {
    /// `{path}`, `{url, digest}` or `{artifact}`; `None` where it is wrong.
    pub(super) fn external(
        &self,
        external: External,
        scope: &Scope,
        spot: &Spot,
        sources: &mut Sources,
        problems: &mut Vec<Problem>,
    ) -> Option<()> {
        let mut field = |name: &str, text: Option<String>| match text {
            None => Some(None),
            Some(text) => scope.text(text, &spot.key(name), problems).map(Some),
        };
        let fields = (
            field("path", external.path),
            field("url", external.url),
            field("digest", external.digest),
            field("artifact", external.artifact),
        );
        let (Some(path), Some(url), Some(digest), Some(artifact)) = fields else { return None };
        let source = match (path, url, digest, artifact) {
            (Some(path), None, None, None) if !path.is_empty() => Ok(Source::Path(self.resolver.folder.join(path))),
            (None, Some(url), digest, None) => url_source(url, digest, spot),
            (None, None, None, Some(artifact)) => artifact_source(&artifact, spot),
            _ => Err(wrong_external(spot)),
        };
        match source {
            Ok(source) => {
                let port_type = external_type(&source);
                sources.found.push(Found { source, port_type, item: None });
                Some(())
            }
            Err(problem) => {
                // A field of it that can't be read is told already.
                let place = spot.place();
                if !self.resolver.broken.is_inside(&place) {
                    problems.push(*problem);
                }
                None
            }
        }
    }
}

/// What something from outside is, as far as its name tells.
fn external_type(source: &Source) -> PortType {
    let is_parquet = match source {
        Source::Path(path) => path.extension().is_some_and(|extension| extension == "parquet"),
        Source::Url { url, .. } => url.split(['?', '#']).next().is_some_and(|path| path.ends_with(".parquet")),
        _ => false,
    };
    if is_parquet { PortType::Table } else { PortType::Tree }
}

fn url_source(url: String, digest: Option<String>, spot: &Spot) -> Result<Source, Box<Problem>> {
    const HINT: &str = "it is the BLAKE3 of the bytes: `b3sum FILE` prints it";
    if !url.contains("://") {
        let problem = Problem::new(spot.key("url").place(), format!("`{url}` is no URL"));
        return Err(Box::new(problem.hint("URLs look like `https://…`, `file://…` or `s3://…`")));
    }
    let Some(digest) = digest else {
        let problem = Problem::new(spot.place(), "`url` needs the `digest` of its bytes");
        return Err(Box::new(problem.missing(["digest"]).hint(HINT)));
    };
    if digest.len() != 64 || !digest.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
        let problem = Problem::new(spot.key("digest").place(), "`digest` must be 64 lower-case hex digits");
        return Err(Box::new(problem.hint(HINT)));
    }
    Ok(Source::Url { url, digest })
}

fn artifact_source(artifact: &str, spot: &Spot) -> Result<Source, Box<Problem>> {
    match artifact.split_once('@') {
        Some((name, tag)) if is_tag_part(name) && is_tag_part(tag) => {
            Ok(Source::Artifact { name: name.to_owned(), tag: tag.to_owned() })
        }
        _ => {
            let problem = Problem::new(spot.key("artifact").place(), format!("`{artifact}` is no `name@tag`"));
            Err(Box::new(problem.hint("artifacts look like `ops-dataset@v1`")))
        }
    }
}

fn wrong_external(spot: &Spot) -> Box<Problem> {
    let message = "an input from outside is one of `path`, `url` with `digest`, and `artifact`";
    let hint = "write `{ path: FILE }`, `{ url: URL, digest: BLAKE3 }` or `{ artifact: NAME@TAG }`";
    Box::new(Problem::new(spot.place(), message).hint(hint))
}
