/* An expert's work that the CPU does beside the GPU, as a record in memory that both see. C++ and CUDA compile it.
 *
 * Jobs are numbered from 1 on in the order in which they are posted; job `number` lies in record (number - 1) % n_records
 * of a ring. A GPU's compare-and-swap on host memory is not atomic for the CPU over PCIe; loads and stores of whole words
 * are. So every word has one side that writes it, and a job that nobody has claimed is taken back as in Dekker's algorithm:
 * each side writes its own word, then, behind a fence, reads the other's.
 *
 *   who posts       fills the record, then posted = number
 *   the CPU         answer = CLAIMED, fence, reads back: taken back, then answer = DECLINED; else accepted = number,
 *                   computes, answer = DONE
 *   who posts       to take it back: back = number, fence, reads answer: none of this number, then the job is its own;
 *                   CLAIMED, then it waits for DONE or DECLINED
 *
 * If the poster's read came before the CPU's claim, the CPU's read comes behind the poster's `back`, and the CPU declines.
 * So a job is computed by exactly one side. What is accepted is never declined any more, so who posts need not wait for
 * the answer to know whose the job is. A record may be posted again when its job is DONE, DECLINED, or was taken back.
 */
#ifndef SPARK_EXPERT_JOB_H
#define SPARK_EXPERT_JOB_H

#define SPARK_JOB_TOKENS 32 /* at most */
#define SPARK_JOB_ROWS 256  /* of activations that a job may name: `token` is a byte */
#define SPARK_JOB_RECORDS 64 /* at most */

/* What of an expert: act(gate h) * (up h), rows `first` to `last` of gate and up; down z, rows of down, z given; or both,
 * all rows of gate and up and those of down. No rows: nothing is computed, and the answer is DONE. */
enum { SPARK_JOB_FIRST = 1, SPARK_JOB_SECOND = 2, SPARK_JOB_BOTH = 3 };

/* The low two bits of `answer`; the others are the number. */
enum { SPARK_JOB_CLAIMED = 1, SPARK_JOB_DONE = 2, SPARK_JOB_DECLINED = 3 };

typedef struct spark_job {
    /* A line of who posts. */
    unsigned long long posted, back;
    unsigned long long unused[6];

    /* Of who posts, before `posted`. Addresses as the CPU knows them. */
    unsigned long long source[3]; /* gate, up, down */
    /* Rows of activations [<= 256, columns], of which those in `token` are used: signed bytes, and a float for each 32 of
     * them; where the weights are floats, floats and no scales. Outputs have a row for each of `token`, of which the
     * columns `first` to `last` are written: y in floats; z as an input of SECOND would be. */
    unsigned long long input, input_scales;
    unsigned long long output, output_scales;
    float gate_scale; /* of the products with gate */
    int bank;         /* of those that the CPU's pool was made with: types, shapes, activation */
    int part;         /* SPARK_JOB_FIRST, ... */
    int first, last;  /* of FIRST, where z has 8 bits, multiples of 32 */
    int count;        /* of tokens */
    unsigned char token[SPARK_JOB_TOKENS];
    unsigned char more[16];

    /* A line of the CPU. */
    unsigned long long answer;
    unsigned long long claimed_ns, done_ns; /* of the host's monotonic clock */
    unsigned long long accepted;
    unsigned long long rest[4];
} spark_job;

#endif
