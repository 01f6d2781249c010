//! Which part of an answer is the candidate.
//!
//! **The rule.** An answer is read as Markdown's fenced code blocks: a line that begins with ```` ``` ```` opens a block, the next
//! line that begins with it closes it, and a block that is still open when the answer ends goes on to the end. The candidate is
//! the **last block that has `TASK_LAUNCH` in it**; without such a block the last one that has `__global__` in it; else there is
//! none. Text outside of blocks never counts.
//!
//! The last one, because models correct themselves below what they wrote first; `TASK_LAUNCH`, because a fragment that only
//! shows a change has none. A candidate that lacks it is still judged, so that the policy learns why it does not compile.

const FENCE: &str = "```";

/// The candidate in an answer, the prefill included.
pub fn candidate(answer: &str) -> Option<String> {
    let blocks = blocks(answer);
    let with = |word: &str| blocks.iter().rfind(|block| block.contains(word));
    with("TASK_LAUNCH").or_else(|| with("__global__")).cloned()
}

/// Whether a text ends inside of a block, as a prefill may.
pub fn is_open(text: &str) -> bool {
    text.lines().filter(|line| line.trim_start().starts_with(FENCE)).count() % 2 == 1
}

fn blocks(answer: &str) -> Vec<String> {
    let (mut blocks, mut block) = (Vec::new(), None::<String>);
    for line in answer.lines() {
        if line.trim_start().starts_with(FENCE) {
            match block.take() {
                Some(done) => blocks.push(done),
                None => block = Some(String::new()),
            }
        } else if let Some(block) = &mut block {
            block.push_str(line);
            block.push('\n');
        }
    }
    blocks.extend(block);
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "__global__ void f(float* out) {}\nTASK_LAUNCH(f, 1, 1);\n";

    #[test]
    fn the_candidate_is_the_last_block_that_launches() {
        let fragment = "```\n__global__ void g();\n```";
        let other = KERNEL.replace("void f", "void h");
        let answer =
            format!("First:\n```cuda\n{other}```\nBetter:\n```cpp\n{KERNEL}```\nI changed\n{fragment}\nthere.");
        assert_eq!(candidate(&answer).as_deref(), Some(KERNEL));
    }

    #[test]
    fn a_block_that_was_not_closed_counts() {
        assert_eq!(candidate(&format!("```cuda\n{KERNEL}")).as_deref(), Some(KERNEL));
        assert_eq!(candidate("```\n__global__ void f(").as_deref(), Some("__global__ void f(\n"));
    }

    #[test]
    fn without_a_launch_a_kernel_will_do() {
        let answer = "```\n__global__ void a();\n```\n```\n__global__ void b();\n```\n```\nnvcc a.cu\n```";
        assert_eq!(candidate(answer).as_deref(), Some("__global__ void b();\n"));
    }

    #[test]
    fn text_outside_of_blocks_never_counts() {
        for answer in ["", KERNEL, "```\nint x;\n```", "no code"] {
            assert_eq!(candidate(answer), None, "{answer}");
        }
    }

    #[test]
    fn line_ends_and_indents_change_nothing() {
        let answer = format!("1. This:\n   ```cuda\n{KERNEL}   ```\n").replace('\n', "\r\n");
        assert_eq!(candidate(&answer).as_deref(), Some(KERNEL));
    }

    #[test]
    fn a_prefill_may_open_a_block() {
        assert!(is_open("```cuda\n#include \"task.h\""));
        assert!(!is_open("```cuda\nint x;\n```") && !is_open("Here is the kernel:"));
    }
}
