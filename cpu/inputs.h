// What products take: rows of activations, quantized or normed by token, in parallel.
#pragma once

#include "workspace.h"

namespace spark {

// Activation rows of x [T][cols] for weights of any type; float weights read x itself.
inline Inputs quantized(spark_workspace &ws, const float *x, int64_t T, int64_t cols, bool needed) {
    const Inputs in{ws.activations.get(), x, supers(cols), cols};
    if (needed)
        ws.rows(T, double(cols) / 4, [&](int64_t first, int64_t last, int) {
            for (int64_t t = first; t < last; t++)
                ws.kernels.quantize(x + t * cols, cols, ws.activations.get() + t * in.supers);
        });
    return in;
}

// The same for the RMS norm of rows of x, which goes to `to`; row t of it is x's row index[t], or t.
inline Inputs normed(spark_workspace &ws, const float *x, const int32_t *index, int64_t T, int64_t cols,
                     const float *norm, float eps, bool needed, float *to) {
    const Inputs in{ws.activations.get(), to, supers(cols), cols};
    ws.rows(T, double(cols) / 2, [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; t++) {
            ws.kernels.rms_norm(x + (index ? index[t] : t) * cols, norm, cols, eps, to + t * cols);
            if (needed)
                ws.kernels.quantize(to + t * cols, cols, ws.activations.get() + t * in.supers);
        }
    });
    return in;
}

inline void product(spark_workspace &ws, const Weights &w, const Inputs &in, int64_t T, float *y) {
    ws.rows(w.rows, row_ns(w, T), [&](int64_t first, int64_t last, int) {
        ws.kernels.product(w, first, last, in, nullptr, T, y + first, w.rows);
    });
}

} // namespace spark
