/* Gaussian noise on a CPU: Box-Muller and the addition in one pass over a block of the cipher's words.

   Its plain twin is randomness.py (_one_draw, _noisy_plain): the same words make the same numbers. The polynomials are
   gpu_noise.py's, that of the logarithm doubled. No branch depends on the words, so that time tells nothing of them.
   Called by cpu_noise.py.
*/
#include <math.h>
#include <stdint.h>
#include <string.h>

#define PIECE 256 /* pairs at a time: they stay in the nearest cache */

/* One version for each generation of processors, chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define EVERY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_PROCESSOR
#endif

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

typedef struct {
    const void *value; /* float or double, as ``wide`` says */
    float *out;
    int64_t first, size; /* its numbers' places among those of all tensors */
    double scale;
} Tensor;

static inline double number(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* sqrt(-2 ln u) for u = (the low 63 bits of word + (more + 1/2) 2^-32) 2^-63, which is never 0. */
static inline double radius(uint64_t word, uint32_t more) {
    /* v = 2^97 u in three parts, each the digits of a double behind 2^118, 2^86 and 2^54, which are taken away: not
       every processor can convert several numbers at a time */
    double v = number((word >> 32 & 0x7FFFFFFF) | 0x4750000000000000) - 0x1.00000001p118;
    v += number((word & 0xFFFFFFFF) | 0x4550000000000000);
    v += number(more | 0x4350000000000000) - 0x1.fffffffffffffp53;
    /* v = 2^k m, sqrt(1/2) <= m < sqrt(2): the high word of the root is 0x3FE6A09E */
    uint64_t k = (bits_of(v) - 0x3FE6A09E00000000) >> 52;
    double m = number(bits_of(v) - (k << 52));
    /* -2 ln m = 4 artanh s, s = (1 - m)/(1 + m): 1 - m is exact, so that all digits are right next to 1, too */
    double s = (1.0 - m) / (1.0 + m), x = s * s;
    double p = 0.36367130279541016 + x * (0.30628204345703124 + x * 0.2959096431732178);
    p = 0.5714285748857063 + x * (0.4444439690920654 + x * p);
    p = 4.0 + x * (1.3333333333333448 + x * (0.799999999988334 + x * p));
    return sqrt(s * p + 1.3862943611198906 * (0x1p52 + 97.0 - number(k | 0x4330000000000000)));
}

EVERY_PROCESSOR
static void draw(const uint64_t *word, const uint64_t *turn, const uint32_t *more, int64_t pairs, double *cosine,
                 double *sine) {
    for (int64_t i = 0; i < pairs; i++) {
        /* of 53 bits the highest is half a turn, which changes both signs; the others are the digits of a number in
           [1, 2), half turns from 1. From the quarter turn at 1.5, half turns the other way: exact, -1/2 < h <= 1/2 */
        double r = number(bits_of(radius(word[i], more[i])) ^ (turn[i] << 11 & 0x8000000000000000));
        double h = 1.5 - number((turn[i] & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000), x = h * h;
        /* sin(pi h) = h p and cos(pi h) = (h^2 - 1/4) q, both 0 where they should be */
        double p = 0.00046629970893263817 + x * (-2.1903179003857076e-05 + x * 7.694725354667753e-07);
        p = -0.5992645293194676 + x * (0.08214588657523297 + x * (-0.007370430496523422 + x * p));
        p = 3.141592653589793 + x * (-5.16771278004997 + x * (2.5501640398773393 + x * p));
        double q = 0.0019036697022300883 + x * (-0.00010351522359997034 + x * 4.131827154196799e-06);
        q = -1.2780132969493538 + x * (0.2289978875193276 + x * (-0.025330969594319193 + x * q));
        q = -4.0 + x * (3.739208802178683 + x * q);
        cosine[i] = r * (h * p);
        sine[i] = r * ((h - 0.5) * (h + 0.5) * q);
    }
}

EVERY_PROCESSOR
static void add(const double *z, int64_t count, const void *value, int wide, float *out, double scale, double factor) {
    if (wide)
        for (int64_t i = 0; i < count; i++) out[i] = (float)((((const double *)value)[i] + scale * z[i]) * factor);
    else
        for (int64_t i = 0; i < count; i++) out[i] = (float)((((const float *)value)[i] + scale * z[i]) * factor);
}

/* To the numbers at ``place`` and behind, whichever tensors they belong to; ``*at`` is the one looked at last. */
static void spread(const double *z, int64_t place, int64_t count, const Tensor *tensors, int64_t *at, int wide,
                   double factor) {
    while (count) {
        while (tensors[*at].first + tensors[*at].size <= place) ++*at;
        const Tensor *t = tensors + *at;
        int64_t from = place - t->first, here = t->size - from < count ? t->size - from : count;
        const char *value = (const char *)t->value + from * (wide ? sizeof(double) : sizeof(float));
        add(z, here, value, wide, t->out + from, t->scale, factor);
        z += here, place += here, count -= here;
    }
}

/* out = factor (value + scale z) for the ``count`` numbers from ``start`` on. ``words``: of every pair of numbers its
   64-bit word, then its turn, then 32 bits more. The tensors follow one another and hold all these numbers. */
EXPORTED void clipwise_noisy(const uint8_t *words, int64_t start, int64_t count, const Tensor *tensors, int wide,
                             double factor) {
    int64_t half = (count + 1) / 2, one = 0, other = 0;
    const uint64_t *word = (const uint64_t *)words;
    const uint64_t *turn = word + half;
    const uint32_t *more = (const uint32_t *)(words + 16 * half);
    double cosine[PIECE], sine[PIECE];
    for (int64_t i = 0; i < half; i += PIECE) {
        int64_t pairs = half - i < PIECE ? half - i : PIECE;
        draw(word + i, turn + i, more + i, pairs, cosine, sine);
        spread(cosine, start + i, pairs, tensors, &one, wide, factor);
        int64_t rest = count - half - i;
        spread(sine, start + half + i, rest < pairs ? rest : pairs, tensors, &other, wide, factor);
    }
}
